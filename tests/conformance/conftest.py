"""JAX's CPU backend with four devices, for the programs that need them; and the table at the end of the run."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

# Before any backend starts.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"


@pytest.fixture(scope="module", autouse=True)
def locations_without_files() -> Iterator[None]:
    """Leave files and lines out of locations: they tell who called, and that differs. Names stay."""
    import jax

    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    yield
    jax.config.update(name, before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print for each row of docs/conformance.md on how many programs both agreed."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            row = dict(report.user_properties).get("row") if report.when == "call" else None
            if row:
                counts.setdefault(str(row), Counter())[outcome] += 1
    if counts:
        terminalreporter.section("conformance")
        for row, outcomes in counts.items():
            terminalreporter.line(f"{row:<75} {outcomes['passed']:>3} agree {outcomes['failed']:>3} differ")
