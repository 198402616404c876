"""Every notebook runs from top to bottom in a fresh kernel."""

import os
from pathlib import Path

import pytest
from absl.testing import absltest, parameterized

_FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "notebooks"


@pytest.mark.slow
class NotebooksTest(parameterized.TestCase):
    @parameterized.parameters(*((path.name,) for path in sorted(_FOLDER.glob("*.ipynb"))))
    def test_runs(self, name):
        import nbclient
        import nbformat

        notebook = nbformat.read(_FOLDER / name, as_version=4)
        environment = {**os.environ, "ERNIE5_JAX_RUN": self.create_tempdir().full_path, "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)  # the notebook's own devices, not those of the tests
        client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(_FOLDER)}})
        client.execute(env=environment)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        pictures = [output for output in outputs if "image/png" in output.get("data", {})]
        self.assertLen(pictures, 3)
        self.assertTrue(any("audio" in output.get("data", {}).get("text/html", "") for output in outputs))


if __name__ == "__main__":
    absltest.main()
