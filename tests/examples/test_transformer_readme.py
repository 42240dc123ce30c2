"""What examples/transformer/README.md shows is what the commands print."""

import os
from pathlib import Path

import pytest

from tests.examples import transformer_readme


@pytest.mark.skipif("TRANSFORMER_FOLDER" not in os.environ, reason="takes what Bazel built for TPUs and NVIDIA devices")
def test_output_is_as_printed() -> None:
    shown = transformer_readme.README.read_text("utf-8")
    folder = Path(os.environ["TRANSFORMER_FOLDER"]).parent
    assert shown.count("<!-- output of: ") == 5
    # When it has changed: python -m tests.examples.transformer_readme bazel-bin/examples/transformer
    assert transformer_readme.rewritten(shown, folder) == shown
