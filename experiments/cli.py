"""What every script shares: flags, readable errors, and JAX set-up. Nothing heavy is imported before flags are parsed.

A script looks like this:

    CONFIG = cli.define_config("tiny.py")

    def main(argv):
        from ernie5_jax import training  # heavy imports stay inside main, so that --help is fast

        config = cli.load_config(CONFIG)

    if __name__ == "__main__":
        cli.run(main)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging
from ml_collections import config_flags

from ernie5_jax.errors import UserError

if TYPE_CHECKING:
    from ernie5_jax.config import ExperimentConfig

REPOSITORY = Path(__file__).resolve().parents[1]

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_COLLECTIVE_TIMEOUT_FLAG = "--xla_cpu_collective_call_terminate_timeout_seconds"
_GOOGLE_PCI_VENDOR = "0x1ae0"
_TUNABLES = "GLIBC_TUNABLES"
KEEP_FREED = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"arena_max": 1, "mmap_max": 0, "trim_threshold": 2**40, "top_pad": 2**28}.items()
)
"""glibc settings under which freed memory stays with the process, in one heap."""


def define_seed(what: str) -> flags.FlagHolder[int]:
    """The flag --seed, 32 bits: what every random generator takes."""
    return flags.DEFINE_integer("seed", 0, what, lower_bound=0, upper_bound=2**32 - 1)


def define_config(default: str | None = None, name: str = "config") -> flags.FlagHolder:
    """Defines `--config=FILE.py` with overrides `--config.a.b=c`.

    Args:
      default: File name inside `configs/`; None makes the flag required.
      name: Name of the flag.
    """
    path = str(REPOSITORY / "configs" / default) if default else None
    text = f"Experiment file; a key is overridden by --{name}.some.key=value."
    holder = config_flags.DEFINE_config_file(name, path, text, lock_config=True)
    if default is None:
        flags.mark_flag_as_required(holder)
    return holder


def define_select() -> flags.FlagHolder[Any]:
    """Defines `--select`, a rule of `evaluation.submodels`; that one is not imported, so that --help is fast."""
    rules = ["usage", "nested", "even", "random", "importance"]
    return flags.DEFINE_enum("select", "usage", rules, "Which layers and experts stay.")


def load_config(holder: flags.FlagHolder) -> ExperimentConfig:
    """The checked, frozen configuration behind a flag of `define_config`.

    Raises:
      ConfigError: A value is unknown, wrongly typed or contradicts another one.
    """
    from ernie5_jax.config import ExperimentConfig, from_mapping

    return from_mapping(ExperimentConfig, holder.value)


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses flags, sets JAX up, calls `main([program])` and exits.

    A `UserError` or `OSError` becomes one line on stderr and exit code 1; `ERNIE5_JAX_TRACEBACK=1` shows where it
    came from. `--help` exits with 0 before anything is loaded.
    """
    if any(argument in ("--help", "-h", "-help", "--helpshort") for argument in sys.argv[1:]):
        print(_help_text())
        sys.exit(0)
    _restart_with_kept_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # text of a model need not be what a terminal can show
    sys.excepthook = _without_closed_loops

    def guarded(argv: Sequence[str]) -> int | None:
        try:
            if len(argv) > 1:
                raise UserError(f"argument {argv[1]!r}: unexpected, allowed: flags such as --name=value (see --help)")
            if not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)
            set_up_jax(_emulated_devices())
            return main(argv[:1])
        except (UserError, OSError) as error:
            return _report(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    app.run(guarded, flags_parser=_parse_flags)


def _without_closed_loops(kind: type[BaseException], error: BaseException, where: Any) -> None:
    """`sys.excepthook` without what threads of tensorstore print after a failed read or write; it is reported."""
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        sys.__excepthook__(kind, error, where)


def set_up_jax(devices: int = 0) -> None:
    """Chooses the platform, emulates CPU devices and switches the persistent compilation cache on.

    Must run before the first use of a device. What the user set in the environment (`JAX_PLATFORMS`, `XLA_FLAGS`,
    `JAX_COMPILATION_CACHE_DIR`) wins.

    Args:
      devices: CPU devices to emulate; 0 or 1 leaves the single one.
    """
    chosen = default_platform()
    if chosen:
        os.environ["JAX_PLATFORMS"] = chosen
    emulate = devices > 1 and _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", "")
    if emulate and _COLLECTIVE_TIMEOUT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        # Emulated devices outnumber the cores: a collective may wait long for its last participant.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVE_TIMEOUT_FLAG}=600".strip()

    import jax

    if chosen:
        jax.config.update("jax_platforms", chosen)
    if emulate:
        jax.config.update("jax_num_cpu_devices", devices)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        enable_compilation_cache(cache_folder())


def _restart_with_kept_memory() -> None:
    """Runs the script anew, in the same process: the allocator reads its settings at the start only.

    XLA:CPU frees its buffers after every step; by default the system takes large ones back, and touching them again
    page by page costs a fifth of a small step, more in a virtual machine. `GLIBC_TUNABLES` of the user's own wins.
    """
    glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    if not glibc or _TUNABLES in os.environ or _has_tpu() or _has_gpu():
        return
    os.environ[_TUNABLES] = KEEP_FREED
    with contextlib.suppress(OSError):  # then without
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def default_platform() -> str:
    """Value for `JAX_PLATFORMS` where leaving it unset would misbehave, else "".

    An installed libtpu on a machine without a TPU makes JAX wait and warn at every start, so it is passed over there.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None or _has_tpu():
        return ""
    has_cuda = _has_gpu() and any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return "cuda,cpu" if has_cuda else "cpu"


def cache_folder() -> Path:
    """Root of the compilation cache: `ERNIE5_JAX_CACHE` or `~/.cache/ernie5_jax`."""
    return Path(os.environ.get("ERNIE5_JAX_CACHE") or Path.home() / ".cache" / "ernie5_jax")


def enable_compilation_cache(root: Path, min_compile_seconds: float = 0.5) -> None:
    """Keeps compiled programs under `root`, in a folder of their own per kind of processor.

    Programs compiled for a CPU hold its instructions; loading them on an older one would crash.
    """
    import jax

    folder = root / "compiled" / _machine_tag()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _machine_tag() -> str:
    features = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _has_tpu() -> bool:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    on_bus = any(path.read_text(errors="replace").strip() == _GOOGLE_PCI_VENDOR for path in vendors)
    return on_bus or "TPU_WORKER_ID" in os.environ or "TPU_NAME" in os.environ


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _emulated_devices() -> int:
    """`--config.parallel.data` of the experiment, if the script has one."""
    if "config" not in flags.FLAGS:
        return 0
    data = getattr(getattr(flags.FLAGS["config"].value, "parallel", None), "data", 0)
    return data if isinstance(data, int) else 0


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        _check_config_file(argv)
        return flags.FLAGS(list(argv))
    except UserError as error:
        sys.exit(_report(error))
    except Exception as error:  # absl, ml_collections and config files raise whatever they like here
        sys.exit(_report(_flag_error(error, argv)))


def _check_config_file(argv: Sequence[str]) -> None:
    for i, argument in enumerate(argv):
        name, equals, path = argument.partition("=")
        if name in ("--config", "-config"):
            path = path if equals else "".join(argv[i + 1 : i + 2])
            if not Path(path.partition(":")[0]).is_file():
                raise UserError(f"flag --config: found {path!r}, allowed: an existing Python file with get_config()")


def _flag_error(error: Exception, argv: Sequence[str]) -> UserError:
    """The error in one line; a mistyped `--config.some.key` is named in full."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    # ml_collections quotes the message of a missing key twice.
    text = text.replace("\\n", "\n").replace("\\'", "'")
    if text[:1] == text[-1:] == "'":
        text = text[1:-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        return UserError(f"{lines[0].rstrip(':')}: {lines[-1]}")
    if isinstance(error, AttributeError | KeyError):
        for argument in argv[1:]:
            path = argument.lstrip("-").partition("=")[0].partition(".")[2]
            if any(part and part in lines[0] for part in path.split(".")):
                return UserError(f"config key '{path}': unknown. {' '.join(lines[1:])}")
    return UserError("; ".join(lines))


def _report(error: BaseException) -> int:
    """Prints `error` as one line and returns the exit code."""
    if os.environ.get("ERNIE5_JAX_TRACEBACK"):
        traceback.print_exception(error)
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"file '{error.filename}': " if error.filename else ""
        text = f"{where}{error.strerror}, allowed: existing files, folders with room and permission"
    print(f"error: {text}", file=sys.stderr)
    return 1


def _help_text() -> str:
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "flags:"]
    found = {flag.name: flag for module in (sys.argv[0], __name__) for flag in _flags_of(module)}
    for name in sorted(found):
        flag = found[name]
        default = "" if flag.default is None or name == "config" else f" (default: {flag.default_as_str})"
        lines.append(f"  --{name}: {' '.join((flag.help or '').split())}{default}")
    return "\n".join(lines)


def _flags_of(module: str) -> list[flags.Flag]:
    return list(flags.FLAGS.get_key_flags_for_module(module))
