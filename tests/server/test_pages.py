"""The live page and the metrics of a whole server: who may see them, and what is counted."""

from __future__ import annotations

import re

from chairlift.config import Config, KeyConfig
from chairlift.server.tenants import hash_key


def value(server, name, **labels):
    """A series of a scrape, which must be there."""
    text = server.client.get("/metrics").text
    found = re.findall(rf"^chairlift:{name}(?:{{(.*)}})? (\S+)$", text, flags=re.MULTILINE)
    matching = [
        float(number)
        for given, number in found
        if all(f'{label}="{wanted}"' in given for label, wanted in labels.items())
    ]
    assert matching, f"no {name} with {labels}"
    return sum(matching)


def test_an_open_server_shows_itself(start_server):
    server = start_server()
    assert "<title>Chairlift</title>" in server.client.get("/").text
    server.complete("abc", max_tokens=5)
    server.stream("/v1/completions", {"prompt": "abc", "max_tokens": 4})
    assert server.post("/v1/completions", {"prompt": 7}).status_code == 400
    live = server.client.get("/live").json()
    assert live["model"] == "test-model"
    route = {"route": "/v1/completions"}
    assert value(server, "http_requests_total", status="200", **route) == 2
    assert value(server, "http_requests_total", status="400", **route) == 1
    assert value(server, "http_open_streams") == 0
    assert value(server, "generation_tokens_total", model_name="test-model") == 9
    assert value(server, "engine_up") == 1


def test_with_keys_one_with_admin_rights_is_needed(start_server):
    keys = {
        "ops": KeyConfig(hash=hash_key("sk-ops"), admin=True),
        "acme": KeyConfig(hash=hash_key("sk-acme"), tenant="acme"),
    }
    server = start_server(config=Config(keys=keys))
    assert server.client.get("/").status_code == 200
    for path in ("/live", "/metrics"):
        for key, status in ((None, 401), ("sk-acme", 403), ("sk-ops", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            answer = server.client.get(path, headers=headers)
            assert answer.status_code == status
            assert ("sk-" in answer.text) is False
