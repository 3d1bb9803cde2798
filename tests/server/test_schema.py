"""The OpenAPI description, and valid and invalid requests generated from it."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings

from headstart.server.page.__init__ import render_reference
from tests.clients import import_quietly
from tests.server.running import Running

EXAMPLES = settings(
    max_examples=8,
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def tame(path: str, body: Any) -> Any:
    """Change a body to name an existing model and request a short answer."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name in ("n", "best_of", "max_completion_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 2)
    name = _LENGTHS.get(path, "")
    length = body.get(name)
    if name and (length is None or isinstance(length, int)):
        body[name] = 2 if length is None else min(length, 2)
    return body


def test_pages_load_nothing_from_other_servers(server: Running) -> None:
    for path in (
        "/",
        "/docs",
        "/page/page.css",
        "/page/icon.svg",
        "/page/main.js",
        "/page/reference.js",
    ):
        answer = httpx.get(server.url + path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")


def test_the_reference_escapes_html() -> None:
    body = {"properties": {"<a>": {"type": "string", "default": "<b>"}}, "description": "<c>"}
    shown = render_reference({"paths": {}, "components": {"schemas": {"<d>": body}}})
    assert not any(f"<{letter}>" in shown for letter in "abcd")
    assert all(f"&lt;{letter}&gt;" in shown for letter in "abcd")


def test_the_reference_shows_names_in_backticks_as_code() -> None:
    body = {"properties": {"a": {"type": "string", "description": "as `b<`"}}}
    shown = render_reference({"paths": {}, "components": {"schemas": {"c": body}}})
    assert "as <code>b&lt;</code>" in shown


def test_every_field_has_a_description(server: Running) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    fields = [
        (schema, name, field.get("description"))
        for schema, body in described["components"]["schemas"].items()
        for name, field in body.get("properties", {}).items()
    ]
    assert len(fields) > 400
    assert not [field for field in fields if not field[2]]


def test_examples_are_valid(server: Running) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    description = httpx.get(f"{server.url}/openapi.json").json()
    count = 0
    for schema in description["components"]["schemas"].values():
        for field in schema.get("properties", {}).values():
            for example in field.get("examples", ()):
                count += 1
                jsonschema.validate(example, {**field, "components": description["components"]})
    assert count > 60


def test_examples_of_bodies_are_answered(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    posted = {
        path: operations["post"] for path, operations in paths.items() if "post" in operations
    }
    assert len(posted) >= 11
    for path, operation in posted.items():
        example = operation["requestBody"]["content"]["application/json"]["example"]
        answer = httpx.post(server.url + path, json=example, timeout=60)
        assert answer.status_code == 200, answer.text
    assert httpx.get(server.url + "/v1/models/tiny").status_code == 200
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["example"] == "tiny"


def test_the_description_lists_all_status_codes(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    answers = [operation["responses"] for path in paths.values() for operation in path.values()]
    assert not any("422" in operation or "default" in operation for operation in answers)
    expected = {"200", "400", "401", "403", "404", "413", "415", "429", "500", "503", "504"}
    assert paths["/v1/messages"]["post"]["responses"].keys() == expected
    assert "409" in paths["/cache/reset"]["post"]["responses"]
    assert paths["/cache/live"]["get"]["responses"]["200"]["content"].keys() == {
        "text/event-stream"
    }
    for path in ("/metrics", "/health", "/v1/models", "/cache"):
        kind = httpx.get(server.url + path).headers["content-type"].partition(";")[0]
        assert kind in paths[path]["get"]["responses"]["200"]["content"]
    kinds = paths["/v1/messages"]["post"]["responses"]["200"]["content"].keys()
    assert kinds == {"application/json", "text/event-stream"}


def test_names_in_the_description_are_readable(server: Running) -> None:
    description = httpx.get(f"{server.url}/openapi.json").json()
    names = description["components"]["schemas"].keys()
    assert not any("__" in name for name in names)
    requests = ("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest")
    assert names >= set(requests)
    chat = description["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"] == "Create chat completion"
    assert chat["operationId"] == "create_chat_completion"
    assert chat["tags"] == ["OpenAI"]
    operations = [
        operation for path in description["paths"].values() for operation in path.values()
    ]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_every_reference_has_a_schema(server: Running) -> None:
    text = httpx.get(f"{server.url}/openapi.json").text
    schemas = json.loads(text)["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', text)) <= schemas.keys()


def test_other_methods_are_refused(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    for path, operations in paths.items():
        answer = httpx.request("PATCH", server.url + path.replace("{", "").replace("}", ""))
        assert answer.status_code == 405
        allowed = {method.lower() for method in answer.headers["allow"].split(", ")}
        assert allowed >= operations.keys()  # another pattern may match the path too


def test_described_bodies_are_parsed_by_endpoints(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI describes the paths with a body, and `Endpoints` answers them."""

    async def fail(*_: object) -> None:
        raise AssertionError("FastAPI answers")

    described = server.app.openapi()
    monkeypatch.setattr(APIRoute, "handle", fail)
    bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operations in described["paths"].items()
        if "requestBody" in operations.get("post", {})
    }
    del bodies["/cache/reset"]  # whose body is optional
    assert len(bodies) >= 9
    for path, schema in bodies.items():
        answer = httpx.post(server.url + path, json={"unheard_of": 1})
        assert answer.status_code == 400, path
        assert "has the unknown field 'unheard_of'" in answer.json()["error"]["message"]
        definition = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if "required" in definition:
            message = httpx.post(server.url + path, json={}).json()["error"]["message"]
            assert message in {f"{name}: Field required" for name in definition["required"]}


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="there is no schemathesis")
def test_no_request_fails_the_server(server: Running) -> None:
    schemathesis = import_quietly("schemathesis")
    checks = import_quietly("schemathesis.specs.openapi.checks")
    conformance = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: dict[int, int] = {}

    def check(case: Any) -> None:
        case.body = tame(case.path, case.body)
        answer = case.call(timeout=60)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (case.path, case.body, answer.content)
        case.validate_response(answer, checks=conformance)
        if answer.status_code >= 400 and case.path.startswith("/v1/"):
            assert answer.json()["error"]["message"]

    for result in description.get_all_operations():
        operation = result.ok()
        if operation.path == "/cache/live":  # which never ends
            with httpx.stream("GET", f"{server.url}/cache/live") as answer:
                assert answer.status_code == 200 and next(answer.iter_lines())
            continue
        for mode in schemathesis.GenerationMode:
            if mode == schemathesis.GenerationMode.POSITIVE or operation.method == "post":
                strategy = operation.as_strategy(generation_mode=mode)
                EXAMPLES(given(strategy)(check))()
    assert statuses.keys() >= {200, 400, 404}
    blocks, free = server.pool()
    assert blocks == free
