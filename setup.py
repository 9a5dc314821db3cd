"""Packaging of fairseq_sharing.

fairseq itself is the extra ``[fairseq]`` and not a requirement: an existing source install of fairseq is never
overwritten by installing this plugin.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "fairseq_sharing/__init__.py").read_text("utf-8")).group(1)

# What fairseq's training and decoding commands import. Its metadata also asks for torchaudio, which only its own
# filterbank code needs and which often does not import beside a CPU build of torch; see the README's "Installation".
FAIRSEQ_REQUIREMENTS = [
    "bitarray",
    "cffi",
    "hydra-core>=1.3.2",
    "omegaconf>=2.3",
    "packaging",
    "regex",
    "scikit-learn",
]

# What scripts/prepare_speech.py and `fairseq-generate --scoring wer` import; torchaudio is not needed.
SPEECH_REQUIREMENTS = [
    "editdistance>=0.6",
    "kaldi-native-fbank>=1.20",
    "PyYAML>=5.1",
    "scipy>=1.11",
    "soundfile>=0.12",
]

# What `fairseq-sharing export` and `import` import, each only for its own formats.
EXPORT_REQUIREMENTS = ["ctranslate2>=4.5", "safetensors>=0.4", "tokenizers>=0.20"]

setup(
    name="fairseq_sharing",
    version=VERSION,
    description="Transformers for fairseq whose layers share parameters: SEQUENCE, CYCLE, CYCLE (REV), Universal",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["fairseq_sharing", "fairseq_sharing.*"]),
    install_requires=[
        "matplotlib>=3.7",
        "numpy>=1.26",
        "sacrebleu>=2.4",
        "sentencepiece>=0.2.0",
        "tabulate>=0.9",
        "tensorboard>=2.15",
        "torch>=2.6",
        "tqdm>=4.60",
    ],
    extras_require={
        "fairseq": ["ve-fairseq==0.12.3"],
        "speech": SPEECH_REQUIREMENTS,
        "export": EXPORT_REQUIREMENTS,
        "dev": [
            *FAIRSEQ_REQUIREMENTS,
            *SPEECH_REQUIREMENTS,
            *EXPORT_REQUIREMENTS,
            *("hypothesis", "pytest>=8", "pytest-xdist", "ruff", "transformers>=4.48"),
        ],
    },
    entry_points={"console_scripts": ["fairseq-sharing = fairseq_sharing.tools.main:main"]},
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
