"""schemathesis as the judge of every path, by the OpenAPI document of the service: right and wrong requests."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import APIOperation

pytestmark = pytest.mark.extended

NOT_TO_BE_TOLD = {"positive_data_acceptance", "ignored_auth"}
"""Checks without a meaning here: a schema does not say which tensors fit a model, nor that there is a token."""

MANY = settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def operations(url: str) -> list[APIOperation]:
    load_all_checks()
    # Not from_url: that leaves out the document's own path.
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    schema.config.update(base_url=url)
    return [found.ok() for found in schema.get_all_operations()]


def judge(operation: APIOperation, mode: GenerationMode, headers: dict[str, str] | None = None) -> set[int]:
    """The statuses of the answers; each is checked."""
    checks = [check for check in CHECKS.get_all() if check.__name__ not in NOT_TO_BE_TOLD]
    seen: set[int] = set()

    @MANY
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: schemathesis.Case) -> None:
        # Its own names are mostly unknown. Every second one is a model that there is.
        others = {"load": ["spare"], "generate": ["writer"]}
        names = next((names for word, names in others.items() if word in case.path), ["m", "labels"])
        if "name" in case.path_parameters and len(str(case.path_parameters["name"])) % 2:
            case.path_parameters["name"] = names[len(str(case.path_parameters["name"])) % len(names)]
            if "version" in case.path_parameters:
                case.path_parameters["version"] = "1"
        if "generate" in case.path and isinstance(case.body, dict):
            # A deadline of microseconds is right, and answered with 504.
            for parameters in (case.body, case.body.get("parameters")):
                if isinstance(parameters, dict) and isinstance(parameters.get("timeout"), int):
                    del parameters["timeout"]
        seen.add(case.call_and_validate(checks=checks, headers=headers).status_code)

    each()
    return seen


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name)
def test_every_request_is_answered_as_is_told(service, mode):
    found = operations(service.url)
    assert {"/", "/healthz", "/metrics", "/openapi.json", "/predict"} < {each.path for each in found}
    assert len(found) == 26
    seen = {each.label: judge(each, mode) for each in found if mode.is_positive or each.body}
    assert not [statuses for statuses in seen.values() if max(statuses) >= 500]
    if mode.is_positive:
        without_answer = {label for label, statuses in seen.items() if 200 not in statuses}
        # These need a right image or text, which nothing but the model tells.
        assert without_answer <= {"POST /predict", *(label for label in seen if label.endswith("/infer"))}
    assert service.log.read_text().count("Traceback") == 0


@pytest.mark.parametrize(
    ("headers", "status"), [({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403)]
)
def test_a_refusal_by_the_head_is_told_too(service, headers, status):
    for each in operations(service.url):
        assert judge(each, GenerationMode.POSITIVE, headers) == {status}
