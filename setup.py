"""What pyproject.toml cannot declare: ``hf_zero.pth`` at the root of site-packages, the recipes as
``hf_zero/recipes``, the native core ``hf_zero._cpu``, and links of the README that hold where a
package index shows it; the version is that of the last tag.

The line in the .pth registers hf-zero before a script imports anything, so that ``import
deepspeed`` works ahead of ``import torch``. An editable install does not carry it; there torch's
own autoload does the same a little later.

The native core needs a C++17 compiler and pybind11's headers, and nothing of torch. Without one the
installation goes on with a warning, and torch's operations run; HF_ZERO_REQUIRE_CORE=1 makes it
fail.
"""

from __future__ import annotations

import os
import platform
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

REQUIRE_CORE = "HF_ZERO_REQUIRE_CORE"
PTH = "hf_zero.pth"
RECIPE_FILES = (".py", ".md", ".json", ".yaml", ".ipynb", ".sh", ".svg", ".png")
LINE = "import hf_zero._autoload; hf_zero._autoload.register()\n"


class BuildWithFiles(build_py):
    """build_py that also writes the .pth file and copies the recipes, and lists them as its
    outputs, so that uninstalling removes them.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(self.build_lib)
            with open(self._pth(), "w") as file:
                file.write(LINE)
            for source, target in self._recipes():
                self.mkpath(os.path.dirname(target))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return [*outputs, self._pth(), *(target for _, target in self._recipes())]

    def _pth(self) -> str:
        return os.path.join(self.build_lib, PTH)

    def _recipes(self) -> list[tuple[str, str]]:
        """Return each file of the recipes and its place in the package."""
        return [
            (path, os.path.join(self.build_lib, "hf_zero", path))
            for path in sorted(glob("recipes/**/*", recursive=True))
            if os.path.splitext(path)[1] in RECIPE_FILES
        ]


FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
]
# A file whose name ends so is compiled for that instruction set; the others run on every machine of
# the platform.
INSTRUCTION_SETS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "_avx512bf16": [
        "-mavx512bf16",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx2",
        "-mfma",
        "-mf16c",
    ],
}
X86 = platform.machine().lower() in ("x86_64", "amd64")


def pybind11_headers() -> str:
    """Of the package, or those that torch brings along where a build without isolation finds no
    other.
    """
    try:
        import pybind11

        return str(pybind11.get_include())
    except ImportError:
        torch = find_spec("torch")  # not imported: it takes seconds
        if torch is None or torch.origin is None:
            raise
        return os.path.join(os.path.dirname(torch.origin), "include")


class BuildNative(build_ext):
    """build_ext that compiles each file for its own instruction set, side by side, and does
    without a compiler.
    """

    def build_extension(self, ext: Extension) -> None:
        try:
            self.compiler.add_include_dir(pybind11_headers())
            extra = os.environ.get("HF_ZERO_CXXFLAGS", "").split()
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                objects = list(pool.map(lambda source: self._object(source, extra), ext.sources))
            self.mkpath(os.path.dirname(self.get_ext_fullpath(ext.name)))
            self.compiler.link_shared_object(
                objects,
                self.get_ext_fullpath(ext.name),
                extra_postargs=["-pthread", *extra],
                target_lang="c++",
            )
        except Exception as error:  # whatever a compiler can fail at: the package works without
            if os.environ.get(REQUIRE_CORE) == "1":
                raise
            self.warn(
                f"the native core was not built ({type(error).__name__}: {error}); torch's "
                "operations will run in its place"
            )

    def _object(self, source: str, extra: list[str]) -> str:
        stem = os.path.splitext(source)[0]
        flags = next(
            (
                flags
                for suffix, flags in reversed(INSTRUCTION_SETS.items())
                if stem.endswith(suffix)
            ),
            [],
        )
        (made,) = self.compiler.compile(
            [source], output_dir=self.build_temp, extra_postargs=[*FLAGS, *flags, *extra]
        )
        return str(made)


def sources() -> list[str]:
    """All files of the native core but those for instruction sets of another platform."""
    found = sorted(glob("kernels/cpu/*.cpp"))
    return [
        path
        for path in found
        if X86 or not any(os.path.splitext(path)[0].endswith(suffix) for suffix in INSTRUCTION_SETS)
    ]


# a target of a Markdown link or of an image's tag: what stands before it, and a path here
TARGET = re.compile(r'(\]\(|src(?:set)?=")(?!\w+:|#)([^)"]+)')


def absolute(text: str, source: str) -> str:
    """Return Markdown ``text`` with targets in the repository ``source`` in place of its paths:
    pages of files, and pictures as they are.
    """

    def target(found: re.Match[str]) -> str:
        before, path = found.groups()
        image = Path(path).suffix in (".svg", ".png")
        return f"{before}{source.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path}"

    return TARGET.sub(target, text)


def readme() -> str:
    """Return the README as a package index shows it. Paths stay where ``[project.urls]`` of
    pyproject.toml has no ``Source``.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    urls = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls")
    if not urls or "Source" not in urls:
        print("pyproject.toml names no Source in [project.urls]: links of the README stay relative")
        return text
    return absolute(text, urls["Source"])


commands: dict[str, Any] = {"build_py": BuildWithFiles, "build_ext": BuildNative}
setup(
    cmdclass=commands,
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("hf_zero._cpu", sources(), depends=sorted(glob("kernels/cpu/*.h")))],
)
