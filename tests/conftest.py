"""The one place that chooses devices for the tests: eight emulated CPU devices, before JAX starts."""

import atexit
import os
import shutil
import tempfile

from absl import flags
from absl.testing import absltest  # defines --test_tmpdir

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices on few cores: a collective may wait long for its last participant.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()

from experiments import cli  # noqa: E402 (JAX reads the environment when it is imported)

# Reruns load what an earlier run compiled. Test workers share the folder: entries are checksummed, and one that is
# read while another worker still writes it is compiled anew.
cli.enable_compilation_cache(cli.REPOSITORY / ".cache" / "tests", min_compile_seconds=0.0)

# absltest reads flags that its own main would parse. A folder per process keeps parallel runs apart.
_TEMPORARY = tempfile.mkdtemp(prefix="ernie5_jax_tests_")
atexit.register(shutil.rmtree, _TEMPORARY, ignore_errors=True)
flags.FLAGS.set_default(absltest.TEST_TMPDIR.name, _TEMPORARY)
flags.FLAGS.mark_as_parsed()
