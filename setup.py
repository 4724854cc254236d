"""The C library beside the Python package. Everything else is in pyproject.toml.

It is plain C without Python.h, so nothing but a C compiler is needed, and optional: without one the install
succeeds, and gradsync says once what it then lacks.
"""

from glob import glob

from setuptools import Extension, setup

SOURCES = "src/gradsync/kernels/native"

setup(
    ext_modules=[
        Extension(
            "gradsync.kernels._native",
            sorted(glob(f"{SOURCES}/*.c")),
            depends=sorted(glob(f"{SOURCES}/*.h")),
            # No -march=native: the machine that installs may differ from the one that trains. No contraction of
            # a·b + c: every instruction set gives the same bits.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
            py_limited_api=True,
        )
    ],
    # One wheel for every Python from 3.11 on: the library does not know Python at all.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
