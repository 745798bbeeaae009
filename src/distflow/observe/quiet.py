"""Lines of libraries that whoever reads them can do nothing about. Errors, and what user code warns of, are shown."""

import logging
import warnings

# Which of their functions a library calls next year is between it and the others.
_LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "huggingface_hub", "peft", "torch", "transformers")
_OUTDATED = (DeprecationWarning, FutureWarning)

# Logger and how its line begins: alternatives that no run of ours takes.
_LOGGED = {"bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community"}


def quiet_libraries() -> None:
    """Leave those lines out from here on. What `-W`, PYTHONWARNINGS or user code asks for comes first."""
    for category in _OUTDATED:
        warnings.filterwarnings("ignore", category=category, module=rf"({'|'.join(_LIBRARIES)})(\.|$)", append=True)
    for name in _LOGGED:
        logging.getLogger(name).addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not str(record.msg).startswith(_LOGGED.get(record.name, "\0"))
