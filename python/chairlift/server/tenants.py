"""Who asks: API keys, the trusted header, and the class that a request may have.

A key is known by its SHA-256 alone. All known hashes are compared, each in constant time, so that
the time of an answer says nothing about them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from chairlift.config import KeyConfig, PolicyConfig, shown
from chairlift.request_args import DEFAULT_TENANT
from chairlift.server.errors import HttpError, invalid

_MOST_NAME_BYTES = 128
_NO_CHOICE = (None, "auto", "default")
"""``service_tier`` of a request that leaves the choice to its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request's key (and trusted header) say about it."""

    tenant: str = DEFAULT_TENANT
    default_class: str | None = None
    best_class: str | None = None
    is_admin: bool = False


def hash_key(key: str) -> str:
    """The form in which a configuration holds a key."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """A random key of 256 bits."""
    return f"cl-{secrets.token_urlsafe(32)}"


class KeyRing:
    """The keys there are; without any, everybody may ask."""

    def __init__(self, keys: Mapping[str, KeyConfig], plain: Iterable[str] = ()) -> None:
        """``plain`` are keys of the default tenant, with admin rights."""
        self._callers = [
            (
                key.hash.encode(),
                Caller(
                    tenant=key.tenant,
                    default_class=key.default_class,
                    best_class=key.best_class,
                    is_admin=key.admin,
                ),
            )
            for key in keys.values()
        ]
        self._callers += [(hash_key(key).encode(), Caller(is_admin=True)) for key in plain]

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._callers)

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Find who sent the headers.

        Raises:
            HttpError: 401.
        """
        if not self._callers:
            return Caller()
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hash_key(key.strip().decode("utf-8", "surrogateescape")).encode()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != b"bearer":
            raise HttpError(
                401,
                "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def with_header(caller: Caller, header: str | None, headers: Mapping[bytes, bytes]) -> Caller:
    """Let a trusted header name the tenant, if it is there.

    Raises:
        HttpError: 400, the name cannot be one.
    """
    value = None if header is None else headers.get(header.lower().encode("latin-1"))
    if value is None:
        return caller
    try:
        tenant = value.decode("utf-8").strip()
    except UnicodeDecodeError:
        tenant = ""
    if not 1 <= len(tenant.encode()) <= _MOST_NAME_BYTES or not tenant.isprintable():
        raise invalid(
            header, f"the header {header} must name a tenant in 1 to {_MOST_NAME_BYTES} bytes"
        )
    return replace(caller, tenant=tenant)


def choose_class(service_tier: str | None, caller: Caller, policy: PolicyConfig) -> str | None:
    """Name of the class that a request gets, or None for the tenant's default.

    Where the key has a best class, a class of a higher level gives way to it. The core does the
    same for the tenant.

    Raises:
        HttpError: 400, there is no such class.
    """
    classes = policy.classes
    wanted = caller.default_class if service_tier in _NO_CHOICE else service_tier
    if wanted is not None and wanted not in classes:
        raise invalid(
            "service_tier",
            f"service_tier is {shown(wanted)}; it must be auto, default, or one of the classes: "
            f"{', '.join(classes)}",
            "unknown_class",
        )
    best = caller.best_class
    if best is None or best not in classes:
        return wanted
    tenant = policy.tenants.get(caller.tenant, policy.default_tenant)
    meant = wanted or tenant.default_class or next(iter(classes))
    return best if classes[meant].level > classes[best].level else wanted
