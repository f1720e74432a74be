"""schemathesis as the judge of every endpoint, by the OpenAPI document that the service gives out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.inference.conftest import Service, running_service

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

MANY = settings(
    max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def service(forms: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with running_service(folder, None, f"--model=m={forms / 'model.pt'}", "--model-control=explicit") as service:
        yield service


def test_no_request_that_it_makes_up_is_answered_otherwise_than_is_told(service: Service) -> None:
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 16
    for operation in operations:

        @MANY
        @given(case=operation.as_strategy())
        def judge(case: schemathesis.Case) -> None:
            # Its own names are mostly unknown. Every second one is the model that there is.
            if "name" in case.path_parameters and len(case.path_parameters["name"]) % 2:
                case.path_parameters["name"] = "m"
            if not case.path.endswith("/unload"):
                case.call_and_validate(checks=CHECKS)

        judge()
