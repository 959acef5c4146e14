"""The interface tried by its own description: whatever is asked, it answers as it says, soon, and the driver lives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from api_house import House, open_house
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ANSWER_S = 30.0


@pytest.mark.slow
def test_nothing_that_the_description_allows_or_not_breaks_the_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_house(tmp_path / "run") as house, caplog.at_level(logging.ERROR):
        schema = schemathesis.openapi.from_dict(house.friend().get("/openapi.json").json())
        found = [result.ok() for result in schema.get_all_operations()]
        assert len(found) >= 14
        for operation in sorted(found, key=lambda one: one.path == "/api/stop"):  # after that the job is over
            _try(house, operation)
        assert house.client().get("/health").status_code == 200
        assert house.friend().get("/api/status").status_code == 200
        assert house.town.driver.problem is None
        assert not [record for record in caplog.records if "Exception" in record.getMessage()]


def _try(house: House, operation: Any) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def attempt(case: Any) -> None:
        if "follow" in operation.path:
            case.query = {**(case.query or {}), "seconds": 0}
        answer = case.call(base_url=house.url, headers={"Authorization": house.token.header()}, timeout=ANSWER_S)
        case.validate_response(answer, checks=CHECKS)

    attempt()
