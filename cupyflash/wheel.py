"""The build step that puts the kernels into a wheel; pyproject.toml says everything else.

`package-dir` could say it, too. But setuptools then makes an editable install a finder in code,
which type checkers and editors do not see; this way it is a path in a .pth file.
"""

from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Finds ``cuda_src``, which lies beside the package in a checkout and inside it in a wheel."""

    def get_package_dir(self, package: str) -> str:
        kernels = package == "cupyflash.cuda_src"
        return "cuda_src" if kernels else super().get_package_dir(package)
