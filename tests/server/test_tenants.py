"""Keys, the trusted header, classes, reloads and usage; and that no key is ever told."""

from __future__ import annotations

import json
import logging

import pytest
from running_server import wait_until

from chairlift.config import ClassConfig, Config, KeyConfig, PolicyConfig, TenantConfig
from chairlift.server.settings import ServerSettings, effective_config
from chairlift.server.tenants import Caller, choose_class, hash_key, new_key
from chairlift.testing import ScriptedExecutor

KEYS = {name: new_key() for name in ("ops", "acme", "batch")}
POLICY = PolicyConfig(
    classes={
        "interactive": ClassConfig(level=1),
        "standard": ClassConfig(),
        "batch": ClassConfig(level=-1),
    },
    tenants={"acme": TenantConfig(default_class="standard")},
)


def config_with(**admin):
    return Config(
        policy=POLICY,
        keys={
            "ops": KeyConfig(hash=hash_key(KEYS["ops"]), admin=True),
            "acme": KeyConfig(hash=hash_key(KEYS["acme"]), tenant="acme"),
            "batch": KeyConfig(
                hash=hash_key(KEYS["batch"]),
                tenant="acme",
                default_class="batch",
                best_class="standard",
            ),
        },
        **admin,
    )


@pytest.fixture(scope="module")
def keyed(start_server):
    return start_server(
        config=config_with(),
        settings={"api_keys": ("plain key",), "trust_tenant_header": "X-Tenant"},
    )


def auth(key):
    return {"authorization": f"Bearer {key}"}


def ask(server, key="ops", headers=None, **fields):
    body = {"prompt": "hi", "max_tokens": 2} | fields
    return server.post("/v1/completions", body, headers=auth(KEYS[key]) | (headers or {}))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEYS['ops']}"},
        {"authorization": KEYS["ops"]},
        {"authorization": f"Bearer {KEYS['ops']}x"},
        {"authorization": f"Bearer {hash_key(KEYS['ops'])}"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_key(keyed, headers):
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/test-model"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/load"),
        ("POST", "/admin/reload"),
        ("GET", "/admin/usage"),
    ):
        answer = keyed.client.request(method, path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready", "/version"):
        assert keyed.client.get(path, headers=headers).status_code == 200


def test_with_a_key(keyed):
    for key in KEYS:
        assert ask(keyed, key).status_code == 200
    assert keyed.client.get("/v1/models", headers=auth("plain key")).status_code == 200
    assert keyed.client.get("/v1/models", headers=auth(KEYS["acme"])).status_code == 200


@pytest.mark.parametrize(
    ("key", "tier", "served_as"),
    [
        ("ops", None, "interactive"),
        ("ops", "auto", "interactive"),
        ("ops", "batch", "batch"),
        ("acme", None, "standard"),
        ("acme", "default", "standard"),
        ("acme", "interactive", "interactive"),
        ("batch", None, "batch"),
        ("batch", "auto", "batch"),
        ("batch", "standard", "standard"),
        ("batch", "interactive", "standard"),
    ],
)
def test_the_class_of_a_request(keyed, key, tier, served_as):
    answer = ask(keyed, key, service_tier=tier)
    assert answer.headers["x-request-class"] == served_as
    assert answer.json().get("service_tier") == (served_as if tier else None)


def test_the_best_class_caps_the_tenants_default():
    caller = Caller(tenant="someone", best_class="batch")
    assert choose_class(None, caller, POLICY) == "batch"
    assert choose_class(None, Caller(tenant="someone"), POLICY) is None
    assert choose_class("batch", Caller(best_class="interactive"), POLICY) == "batch"


def test_an_unknown_class(keyed):
    answer = ask(keyed, service_tier="platinum")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "service_tier"
    assert "interactive, standard, batch" in answer.json()["error"]["message"]


def test_usage_by_tenant(start_server):
    server = start_server(
        config=config_with(), settings={"trust_tenant_header": "X-Tenant"}, max_model_len=64
    )
    ask(server, "acme", prompt="12345", max_tokens=3)
    ask(server, "batch", prompt="12345", max_tokens=3, n=2)
    ask(server, "acme", max_tokens="x")
    ask(server, "ops", headers={"x-tenant": "other"})
    body = {"prompt": "hi", "max_tokens": 2}
    chunks = server.stream("/v1/completions", body, headers=auth(KEYS["ops"]))
    assert chunks[-1] == "[DONE]"
    answer = server.client.get("/admin/usage", headers=auth(KEYS["ops"]))
    assert answer.status_code == 200
    tenants = answer.json()["tenants"]
    assert sorted(tenants) == ["acme", "default", "other"]
    acme = tenants["acme"]
    assert (acme["requests"], acme["refused"]) == (3, 1)
    assert (acme["prompt_tokens"], acme["completion_tokens"]) == (10, 9)
    assert tenants["default"]["completion_tokens"] == tenants["other"]["completion_tokens"] == 2
    for key in ("acme", "batch"):
        for method, path in (("GET", "/admin/usage"), ("POST", "/admin/reload")):
            answer = server.client.request(method, path, headers=auth(KEYS[key]))
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("tenant", ["", "x" * 129, b"\xff\xfe", "a\tb"])
def test_a_tenant_that_cannot_be(keyed, tenant):
    answer = ask(keyed, headers={"x-tenant": tenant})
    assert answer.status_code == 400
    assert "X-Tenant" in answer.json()["error"]["message"]


def test_a_header_that_nobody_trusts(start_server):
    server = start_server(config=config_with())
    ask(server, "acme", headers={"x-tenant": "other"})
    usage = server.client.get("/admin/usage", headers=auth(KEYS["ops"])).json()
    assert list(usage["tenants"]) == ["acme"]


def test_an_open_server_has_no_administration(server):
    for method, path in (("GET", "/admin/usage"), ("POST", "/admin/reload")):
        assert server.client.request(method, path).status_code == 403


CONFIG_FILE = """
[tenants.acme]
max_running = {running}

[keys.ops]
hash = "{ops}"
admin = true
"""


def test_reload(start_server, tmp_path):
    path = tmp_path / "chairlift.toml"
    path.write_text(CONFIG_FILE.format(running=4, ops=hash_key(KEYS["ops"])))
    config = effective_config(Config.from_file(path), 5.0)
    assert config.policy.classes["default"].max_queue_time == 5.0
    server = start_server(config=config, settings={"config_source": path, "queue_timeout": 5.0})

    def reload(key):
        return server.client.post("/admin/reload", headers=auth(KEYS[key]))

    assert reload("acme").status_code == 401
    added = f'\n[keys.acme]\nhash = "{hash_key(KEYS["acme"])}"\n'
    path.write_text(CONFIG_FILE.format(running=2, ops=hash_key(KEYS["ops"])) + added)
    assert ask(server, "acme").status_code == 401
    answer = reload("ops")
    assert answer.json() == {"status": "reloaded", "tenants": ["acme"]}
    assert ask(server, "acme").status_code == 200
    assert reload("acme").status_code == 403
    for broken in ("[keys.ops]\nhash = 5", "[engine]\nmax_num_seqs = 1", "what"):
        path.write_text(broken)
        answer = reload("ops")
        assert answer.status_code == 400, broken
        assert str(path) in answer.json()["error"]["message"]
    assert ask(server, "acme").status_code == 200
    assert server.engine.config.policy.classes["default"].max_queue_time == 5.0


def test_nothing_to_reload(keyed):
    answer = keyed.client.post("/admin/reload", headers=auth("plain key"))
    assert answer.status_code == 400
    assert "--config" in answer.json()["error"]["message"]


def called(name):
    return {"x-request-id": name}


def logged(caplog, *names):
    """The log's lines about requests of these names: each is written once its answer is sent."""

    def lines():
        told = [record.message for record in caplog.records if record.name.endswith("requests")]
        return {line["request_id"]: line for line in map(json.loads, told)}

    wait_until(lambda: lines().keys() >= set(names))
    return [lines()[name] for name in names]


def test_no_key_is_ever_logged(start_server, caplog):
    with caplog.at_level(logging.DEBUG):
        server = start_server(
            ScriptedExecutor(), config=config_with(), settings={"api_keys": ("plain key",)}
        )
        ask(server, "acme", called("good"), prompt="a secret prompt")
        ask(server, "acme", called("bad"), max_tokens=0, prompt="a secret prompt")
        strange = auth("wrong secret") | called("strange")
        server.post("/v1/completions", {"prompt": "x"}, headers=strange)
        good, bad, stranger = logged(caplog, "good", "bad", "strange")
    assert [line["status"] for line in (good, bad, stranger)] == [200, 400, 401]
    assert good["tenant"] == "acme"
    assert good["prompt_tokens"] == 15
    assert good["completion_tokens"] == 2
    text = caplog.text
    for secret in (*KEYS.values(), "plain key", "wrong secret", "secret prompt"):
        assert secret not in text
    assert all(hash_key(key)[7:] not in text for key in KEYS.values())


def test_prompts_are_logged_where_that_is_asked_for(start_server, caplog):
    server = start_server(settings={"log_prompts": True})
    with caplog.at_level(logging.INFO):
        body = {"prompt": "a prompt", "max_tokens": 1}
        server.post("/v1/completions", body, headers=called("completion"))
        body = {"messages": [{"role": "user", "content": "a message"}], "max_tokens": 1}
        server.post("/v1/chat/completions", body, headers=called("chat"))
        completion, chat = logged(caplog, "completion", "chat")
    assert completion["prompt"] == ["a prompt"]
    assert '"content": "a message"' in json.dumps(chat)


class TestRequestIds:
    """C25."""

    def test_the_clients_own(self, server):
        answer = server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "a-1"})
        assert answer.headers["x-request-id"] == "a-1"
        assert "a-1" not in answer.text

    @pytest.mark.parametrize("name", ["x" * 129, b"\xc3\xbc", "a b", "", "x" * 100_000, b"a\x7f"])
    def test_one_that_cannot_be(self, server, name):
        answer = server.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": name})
        assert answer.status_code in (200, 400)
        if answer.status_code == 200:
            assert answer.headers["x-request-id"].startswith("req-")

    def test_headers_without_end(self, server):
        with server.raw(b"GET /health HTTP/1.1\r\nx: " + b"y" * 1_000_000) as sock:
            assert b"431" in sock.recv(1_000)
        server.check_alive()


def test_settings_are_checked_by_the_configuration():
    assert ServerSettings().served_model_names == ("smollm2-135m",)
