"""Names the packages: those below sta_compile/, and the root folders that are packages below it once installed."""

from setuptools import find_packages, setup

ROOTS = {
    "sta_compile": "sta_compile",
    "sta_compile.codegen": "codegen",
    "sta_compile.cutlass_templates": "cutlass_templates",
}

setup(
    package_dir=ROOTS,
    packages=[
        package
        for name, folder in ROOTS.items()
        for package in [name, *(f"{name}.{below}" for below in find_packages(folder))]
    ],
)
