"""Everything but one file is declared in pyproject.toml: ``hf_zero.pth`` has to lie at the root of site-packages.

The line in it registers hf-zero before a script imports anything, so that ``import deepspeed`` works ahead of ``import
torch``. An editable install does not carry it; there torch's own autoload does the same a little later.
"""

from __future__ import annotations

import os

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "hf_zero.pth"
LINE = "import hf_zero._autoload; hf_zero._autoload.register()\n"


class BuildWithPth(build_py):
    """build_py that also writes the .pth file and owns up to it, so that uninstalling removes it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(self.build_lib)
            with open(self._pth(), "w") as file:
                file.write(LINE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._pth()]

    def _pth(self) -> str:
        return os.path.join(self.build_lib, PTH)


setup(cmdclass={"build_py": BuildWithPth})
