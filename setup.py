"""The compiled parts: searching, and the JSON of answers. Everything else is in pyproject.toml."""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "export.bundle._native",
            ["export/bundle/native/module.cpp"],
            depends=[
                f"export/bundle/native/{name}.h" for name in ("graph", "kernels", "live_graph", "search")
            ],
            cxx_std=17,
            # The kernels are chosen when it runs, so the build needs no flag for the processor.
            extra_compile_args=["-O3", "-fno-math-errno"],
        ),
        Pybind11Extension(
            "service._native", ["service/native/answers.cpp"], cxx_std=17, extra_compile_args=["-O2"]
        ),
    ]
)
