"""What can be chosen about the server, beside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.config import Config
from chairlift.engine_args import DEFAULT_MODEL, ConfigSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The server's own options; times are in seconds."""

    model: str = DEFAULT_MODEL
    """What the engine loads: the root of every served model."""
    served_model_names: Sequence[str] = (DEFAULT_MODEL,)
    """What ``model`` of a request may be; the first is the name in answers."""
    config: Config = field(default_factory=Config)
    """Where the keys and the classes come from."""
    config_source: ConfigSource | None = None
    """What a reload reads again; None: there is nothing to reload."""
    queue_timeout: float | None = None
    """Longest wait of classes that name none of their own."""
    api_keys: Sequence[str] = ()
    """Keys of the default tenant, with admin rights, beside those of the configuration."""
    trust_tenant_header: str | None = None
    """A header that names the tenant: only behind a gateway that sets it."""
    log_requests: bool = True
    """Whether every request leaves a line in the log."""
    log_prompts: bool = False
    """Whether that line holds the prompt."""
    max_request_bytes: int = 16 * 2**20
    """Longest body of a request."""
    max_prompts: int = 1_024
    """Most prompts of one request."""
    request_timeout: float | None = None
    """Longest time from a request's arrival to the end of its answer."""
    slow_reader_timeout: float = 60.0
    """How long a client may leave what was sent unread before it is dropped, and how long it may
    send nothing of a body that it has begun."""
    shutdown_grace: float = 30.0
    """How long a drain lets requests go on."""
    stall_timeout: float = 60.0
    """A step that takes longer makes ``/health`` fail."""
    root_path: str = ""
    """The prefix that a proxy strips from paths."""
    serve_docs: bool = True
    """Whether there are ``/docs`` and ``/openapi.json``."""


def effective_config(config: Config, queue_timeout: float | None) -> Config:
    """Give classes without a ``max_queue_time`` the server's."""
    if queue_timeout is None:
        return config
    policy = config.policy
    classes = {
        name: settings
        if settings.max_queue_time is not None
        else replace(settings, max_queue_time=queue_timeout)
        for name, settings in policy.classes.items()
    }
    return replace(config, policy=replace(policy, classes=classes))
