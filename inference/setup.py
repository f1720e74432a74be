"""Settings that pyproject.toml cannot hold. The version is that of ckpt-tools, because no other fits. In a wheel the
package is named ckpt_tools_inference: `inference` is too general a name.

It is built from a whole checkout or the source distribution of ckpt-tools.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

NAME = "ckpt_tools_inference"
[VERSION] = re.findall('^__version__ = "(.+)"', Path("../ckpt_tools/__init__.py").read_text(), re.MULTILINE)

setup(
    script_name="setup.py",  # so that it is not taken for a module of the package
    version=VERSION,
    install_requires=[f"ckpt-tools=={VERSION}", f"ckpt-tools-training=={VERSION}"],
    packages=[NAME, *(f"{NAME}.{name}" for name in find_packages())],
    package_dir={NAME: "."},
    options={"build": {"build_base": "../build/inference"}},
)
