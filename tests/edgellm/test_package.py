"""The package's face: lazy, so that its lower layers can be imported without the engine."""

import subprocess
import sys

import pytest

import edgellm


def test_importing_a_lower_layer_does_not_import_the_engine():
    code = (
        "import sys, edgellm, edgellm.quant, edgellm.cli.main; "
        "sys.exit('edgellm.llm' in sys.modules or 'edgellm.sampling' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names():
    assert edgellm.SamplingParams.__module__ == "edgellm.sampling_params"
    assert edgellm.__version__.count(".") == 2
    assert set(edgellm.__all__) <= set(dir(edgellm))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        edgellm.nothing  # noqa: B018
