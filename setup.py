"""The steps of a build that pyproject.toml cannot declare.

They write ``hf_zero.pth`` to the root of site-packages, copy the recipes to ``hf_zero/recipes``,
compile the native core ``hf_zero._cpu``, and make the links of the README absolute for package
indexes.

The line in ``hf_zero.pth`` registers hf-zero when Python starts, so that ``import deepspeed`` works
before ``import torch``. An editable installation has no such file: there, torch registers hf-zero
through its entry point, at ``import torch``.

The native core needs a C++17 compiler and the headers of pybind11, but nothing of torch. Without a
compiler the installation continues with a warning, and torch's operations are used instead;
HF_ZERO_REQUIRE_CORE=1 makes it fail.
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

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SETUPTOOLS = 77  # as in pyproject.toml
REQUIRE_CORE = "HF_ZERO_REQUIRE_CORE"
PTH = "hf_zero.pth"
RECIPE_FILES = (".py", ".md", ".json", ".yaml", ".ipynb", ".sh", ".svg", ".png")
LINE = "import hf_zero._autoload; hf_zero._autoload.register()\n"


def require_setuptools() -> None:
    """Stop a build with a setuptools that does not know the form in which pyproject.toml names the
    licence: its own message says nothing of versions.
    """
    if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
        raise SystemExit(
            f"hf-zero is built with setuptools {SETUPTOOLS} or later, and {setuptools.__version__} "
            f"is installed: run pip install 'setuptools>={SETUPTOOLS}', or build without "
            "--no-build-isolation"
        )


def require_scm() -> None:
    """Stop a build without setuptools-scm, which lists the files of an sdist: setuptools would
    continue without the recipes and the sources of the core.
    """
    if find_spec("setuptools_scm") is None:
        raise SystemExit(
            "hf-zero is built with setuptools-scm, which is not installed: run pip install "
            "'setuptools-scm>=8', or build without --no-build-isolation"
        )


class CheckedSdist(sdist):
    """sdist that needs setuptools-scm."""

    def run(self) -> None:
        require_scm()
        super().run()


class BuildWithFiles(build_py):
    """build_py that also writes the .pth file and copies the recipes. It lists them as its outputs,
    so that pip removes them with the package.
    """

    def run(self) -> None:
        require_scm()
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
# Suffixes of files and their instruction sets. Files without a suffix run on every machine of the
# platform.
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
    """Return the folder of pybind11's headers: of the package, or of torch if a build without
    isolation does not have it.
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
    """build_ext that compiles files in parallel, each for its own instruction set, and only warns
    if that fails.
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
        except Exception as error:  # the package works without the core
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
    """Return the files of the native core for this platform."""
    found = sorted(glob("kernels/cpu/*.cpp"))
    return [
        path
        for path in found
        if X86 or not any(os.path.splitext(path)[0].endswith(suffix) for suffix in INSTRUCTION_SETS)
    ]


# the target of a Markdown link or of the tag of an image: the text before it, and a relative path
TARGET = re.compile(r'(\]\(|src(?:set)?=")(?!\w+:|#)([^)"]+)')


def absolute(text: str, source: str) -> str:
    """Return Markdown ``text`` with addresses in the repository ``source`` in place of relative
    paths: the page of a file, or the picture itself.
    """

    def target(found: re.Match[str]) -> str:
        before, path = found.groups()
        image = Path(path).suffix in (".svg", ".png")
        return f"{before}{source.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path}"

    return TARGET.sub(target, text)


def repository() -> str:
    """Return the public address of the repository, which scripts/repository.py reads, too."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    return str(project["tool"]["hf-zero"]["repository"]).rstrip("/")


def links() -> dict[str, Any]:
    """Return the README for a package index and the addresses beside it. Without an address of the
    repository there are none, and paths stay relative.
    """
    text, source = Path("README.md").read_text(encoding="utf-8"), repository()
    if not source:
        print(
            "pyproject.toml: tool.hf-zero.repository is empty: the package has no project URLs, "
            "and links of its README stay relative"
        )
        return {"long_description": text}
    return {
        "long_description": absolute(text, source),
        "project_urls": {
            "Source": source,
            "Documentation": f"{source}/blob/HEAD/hf_zero/docs/index.md",
            "Changelog": f"{source}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{source}/issues",
        },
    }


commands: dict[str, Any] = {
    "build_py": BuildWithFiles,
    "build_ext": BuildNative,
    "sdist": CheckedSdist,
}
require_setuptools()
setup(
    cmdclass=commands,
    **links(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "hf_zero._cpu",
            sources(),
            depends=sorted(glob("kernels/cpu/*.h")),
            # an editable installation copies the core, and only an optional one may be missing
            optional=os.environ.get(REQUIRE_CORE) != "1",
        )
    ],
)
