"""``SGLangWrapper``: a TorchRL policy (``LLMWrapperBase``) that generates or scores with a pool.

``inputs.py`` converts all input modes to token ids. Each result becomes one ``Sample``, and
``rows.py`` converts samples to TorchRL's containers.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.modules.llm.policies.common import LLMWrapperBase

from ...errors import InvalidRequest
from ...launching.blocking import BlockingClient
from .generate_kwargs import override, split
from .inputs import InputReader
from .rows import Keys, Sample, make_rows

_MODES = ("history", "text", "tokens")


class SGLangWrapper(LLMWrapperBase):  # type: ignore[misc]
    """TorchRL's ``SGLangWrapper``, with the containers of its ``TransformersWrapper``.

    Args:
        model: an ``AsyncSGLang`` of ``sglrl.integrations.torchrl``, a running
            ``sglrl.BlockingClient``, the address of a pool, or a model's name or folder. For a
            name or folder, the wrapper starts the model.
        tokenizer: a Hugging Face tokenizer or its name. None: the tokenizer of the model.
        input_mode: "history" (``History``), "text" or "tokens".
        input_key: the key of the input. None: ``(input_mode, "prompt")``, or ``(input_mode,
            "full")`` with ``generate=False``.
        attention_mask_key: the key of the attention mask in tokens mode. It is used if the input
            has no ``(masks_key, "all_attention_mask")``.
        generate: whether to sample. If False, compute only the log-probs of the given tokens.
        generate_kwargs: ``sglrl.SamplingParams`` under the names of TorchRL, vLLM or SGLang, and
            ``timeout``, ``priority``, ``worker`` and ``lora`` of ``client.generate``.
        tokenizer_kwargs: options for text mode, such as ``add_special_tokens``. ``pad_output``
            controls padding.
        pad_output: whether to return tensors [batch, length], with prompts padded on the left and
            responses padded on the right. If False, each sample has a tensor with its own length.
            Read these tensors with ``td.get(key, as_list=True)``, ``as_nested_tensor=True``
            (strided or jagged) or ``as_padded_tensor=True``.
        pad_model_input: accepted as for ``TransformersWrapper`` with ``generate=False``, but not
            used, because the engine packs sequences.
        inplace: True: add the results to the input. False: return only the results. "empty":
            return the results in an empty tensordict of the input's kind. None: True, or False if
            ``num_samples`` is set.
        device: the device of the results if the input has no device.
        layout: the layout of nested tensors that TorchRL's transforms make from the results.
        num_samples: the number of samples per prompt, which adds one batch dimension. ``n`` and
            ``num_return_sequences`` in ``generate_kwargs`` have the same meaning.
        chat_template_name, chat_template: as in ``History.apply_chat_template``.
        return_log_probs: whether to return log-probs. None: True.
        batching, min_batch_size, max_batch_size, batching_timeout: accepted, but not used. Calls
            from several threads run together in the engine, so no call waits for another.
        prefer_tokens: whether history mode generates from tokens of the input, if it has them,
            instead of from its history. The tokens are ``(tokens_key, "prompt")`` or, if they are
            missing, ``(tokens_key, "full")``.

    The results of a sample are ``Tokens`` and ``LogProbs`` (prompt, response, full), ``Masks``,
    ``Text`` and ``ChatHistory``; see ``rows.py``. A log-prob belongs to the sampling distribution
    with temperature and penalties, but without top-p, top-k and min-p. With ``generate=False``, the
    temperature is 1.

    Raises:
        ValueError: arguments contradict each other, the input key is missing, the batch is empty,
            or a prompt is empty. Errors of the client (``sglrl.errors``) are raised unchanged. A
            bad sampling value raises ``InvalidRequest``, which is a ``ValueError``.
        TypeError: the type of the input does not match ``input_mode``, or ``generate_kwargs`` is
            not a mapping.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: str = "history",
        input_key: Any = None,
        attention_mask_key: Any = "attention_mask",
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: Any = None,
        device: Any = None,
        layout: Any = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        history_key: Any = "history",
        text_key: Any = "text",
        tokens_key: Any = "tokens",
        masks_key: Any = "masks",
        log_probs_key: Any = "log_probs",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        if input_mode not in _MODES:
            raise ValueError(
                f"input_mode must be one of 'history', 'text', 'tokens'. Got '{input_mode}'"
            )
        if return_log_probs is False and not generate:
            raise ValueError("return_log_probs must be True when generate=False.")
        if not isinstance(pad_output, bool):
            raise ValueError("pad_output must be a boolean")
        if pad_model_input is not None and generate:
            raise ValueError("pad_model_input is not supported when generate=True.")
        if generate_kwargs is not None and not isinstance(generate_kwargs, Mapping):
            raise TypeError(
                'generate_kwargs must be a mapping such as {"max_new_tokens": 16}, got '
                f"{generate_kwargs!r}"
            )
        self._check_batching(batching, min_batch_size, max_batch_size)
        if batching and min_batch_size is None:
            min_batch_size = 1
        self._min_batch_size = min_batch_size
        self._max_batch_size = max_batch_size
        self._batching_timeout = batching_timeout
        self._batching_lock = threading.Lock() if self.batching else None
        self._batch_queue: list[Any] = []
        self._futures: list[Any] = []

        self.input_mode = input_mode
        self.generate = generate
        self.pad_output = pad_output
        self.prefer_tokens = prefer_tokens
        self.attention_mask_key = attention_mask_key
        self._device = None if device is None else torch.device(device)
        self.layout = torch.strided if layout is None and not pad_output else layout
        self.chat_template_name = chat_template_name
        self.chat_template = chat_template
        self.return_log_probs = return_log_probs is not False
        self.return_history = input_mode == "history"
        self.return_text = input_mode != "tokens"
        self.return_tokens = self.return_masks = True
        self.history_key = history_key
        self.text_key = text_key
        self.tokens_key = tokens_key
        self.masks_key = masks_key
        self.log_probs_key = log_probs_key
        if input_key is None:
            input_key = (input_mode, "prompt" if generate else "full")
        self.input_key = input_key
        self.in_keys = [input_key]
        self.out_keys = [
            key
            for key, wanted in (
                (text_key, self.return_text),
                (masks_key, True),
                (tokens_key, True),
                (log_probs_key, self.return_log_probs),
                (history_key, self.return_history),
            )
            if wanted
        ]

        self.generate_kwargs = self._standardize_generate_kwargs(generate_kwargs)
        several = self.generate_kwargs.get("num_return_sequences")
        if num_samples is None and several is not None and several > 1:
            num_samples = several
        elif num_samples is not None and several not in (None, 1, num_samples):
            raise ValueError("num_samples differs from generate_kwargs['n'].")
        if num_samples is not None and inplace in (True, "empty"):
            raise ValueError(
                "inplace must be False (or None) when generating more than one sample."
            )
        self.num_samples = num_samples if generate else None
        self.inplace = num_samples is None if inplace is None else inplace
        self._call, self._sampling = split(self.generate_kwargs)

        self.model = _service(model)
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        elif tokenizer is None:
            tokenizer = self._own_tokenizer()
        self.tokenizer = tokenizer
        self.tokenizer_kwargs = dict(tokenizer_kwargs or {})
        pad = getattr(tokenizer, "pad_token_id", None)
        if pad is None:
            pad = getattr(tokenizer, "eos_token_id", None)
        self.padding_value = 0 if pad is None else pad
        self._arguments = {**arguments, "model": self.model, "tokenizer": tokenizer}

    @staticmethod
    def _check_batching(batching: bool | None, least: int | None, most: int | None) -> None:
        if batching is False and (least is not None or most is not None):
            raise ValueError("min_batch_size and max_batch_size must be None if batching is False.")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_batch_size ({least}) must be <= max_batch_size ({most})")

    def _own_tokenizer(self) -> Any:
        try:
            return self.client.tokenizer
        except InvalidRequest:
            # The model has no tokenizer. Tokens mode does not need one.
            if self.input_mode != "tokens":
                raise
            return None

    @property
    def client(self) -> Any:
        """The ``sglrl.BlockingClient`` of ``model``."""
        return getattr(self.model, "client", self.model)

    def get_new_version(self, **kwargs: Any) -> Self:
        """Return a wrapper of the same model with some constructor arguments changed.

        Defaults that depend on ``generate`` are computed again.
        """
        return type(self)(**{**self._arguments, **kwargs})

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Generate for, or score, all elements of a tensordict at the same time.

        Args:
            tensordict: the input, with any batch size.
            tensordict_out: the tensordict that receives the results; overrides ``inplace``.
            logits_only: with ``generate=False``, also return "logits": the log-probs of the whole
                vocabulary, float32 [length, vocabulary] per sample. The first row is 0. Without
                ``tensordict_out``, only the results are returned, and ``inplace`` has no effect.
            **kwargs: sampling values for this call. They override ``generate_kwargs``.
        """
        if self.input_key not in tensordict:
            # Keys of more than two names are internal to a ``History``.
            given = [
                key
                for key in tensordict.keys(include_nested=True)
                if isinstance(key, str) or len(key) == 2
            ]
            raise ValueError(
                f"Expected '{self.input_key}' key for {self.input_mode} input mode, but found "
                f"keys: {given}"
            )
        shape = tensordict.batch_size
        if not shape.numel():
            raise ValueError(f"the batch is empty: its size is {tuple(shape)}")
        flat = tensordict.reshape(-1) if tensordict.ndim else lazy_stack([tensordict])
        inputs = list(flat.unbind(0))
        samples = self._generate(inputs, kwargs) if self.generate else self._score(inputs)
        if logits_only and not self.generate:
            samples = _with_logits(self.client, samples)
        keys = Keys(
            text=self.text_key if self.return_text else None,
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            history=self.history_key if self.return_history else None,
        )
        device = self._device if tensordict.device is None else tensordict.device
        size = (*shape, self.num_samples) if self.num_samples else tuple(shape)
        out = make_rows(samples, keys, self.pad_output, self.padding_value, device, size)
        if tensordict_out is None:
            # Logits of different lengths need a lazy stack, which the input may not be.
            if self.inplace is False or logits_only:
                return out
            tensordict_out = tensordict if self.inplace is True else tensordict.empty()
        result = tensordict_out.exclude(*self.out_keys, inplace=True)
        result.update(out, keys_to_update=self.out_keys)
        return cast(TensorDictBase, result)

    def _generate(self, inputs: Sequence[TensorDictBase], kwargs: dict[str, Any]) -> list[Sample]:
        prompts = self._reader().read(inputs)
        for i, prompt in enumerate(prompts):
            if not len(prompt.ids):
                raise InvalidRequest(f"prompt {i} of the batch has no tokens to go on from")
        n = self.num_samples or 1
        call, sampling = self._call, self._sampling
        if kwargs:
            given = self._standardize_generate_kwargs(override(self.generate_kwargs, kwargs))
            if given.get("num_return_sequences", n) != n:
                raise ValueError(
                    f"this wrapper makes {n} samples; see get_new_version(num_samples=...)"
                )
            call, sampling = split(given)
        complete = getattr(self.model, "completions", self.client.generate)
        groups = complete(
            input_ids=[prompt.ids.numpy() for prompt in prompts],
            n=n,
            logprobs=self.return_log_probs,
            sampling=sampling,
            **call,
        )
        samples = []
        for prompt, completions in zip(prompts, groups, strict=True):
            for completion in completions if n > 1 else [completions]:
                logprobs = completion.logprobs
                samples.append(
                    prompt._replace(
                        response=torch.from_numpy(completion.output_ids.astype("int64")),
                        log_probs=None if logprobs is None else torch.from_numpy(logprobs.copy()),
                        response_text=completion.text if self.return_text else None,
                        is_complete=completion.finish_reason == "stop",
                    )
                )
        return samples

    def _score(self, inputs: Sequence[TensorDictBase]) -> list[Sample]:
        prompts = self._reader().read(inputs)
        # A row that consists only of padding has no tokens to score.
        asked = [prompt.ids.numpy() for prompt in prompts if len(prompt.ids)]
        scores = iter(self.client.score(asked, **self._call) if asked else ())
        samples = []
        for prompt in prompts:
            values = torch.zeros(len(prompt.ids))
            if len(values):
                # The first token has no log-prob. TorchRL's convention is 0.
                values[1:] = torch.from_numpy(next(scores)[1:].copy())
            samples.append(prompt._replace(log_probs=values))
        return samples

    def _reader(self) -> InputReader:
        return InputReader(
            input_mode=self.input_mode,
            input_key=self.input_key,
            generate=self.generate,
            tokenizer=self.tokenizer,
            tokenizer_kwargs=self.tokenizer_kwargs,
            chat_template_name=self.chat_template_name,
            chat_template=self.chat_template,
            prefer_tokens=self.prefer_tokens,
            tokens_key=self.tokens_key,
            masks_key=self.masks_key,
            attention_mask_key=self.attention_mask_key,
            padding_value=self.padding_value,
            pad_ends_texts=self.padding_value in self.client.info.eos_token_ids,
        )

    # --- log-probs and distributions --------------------------------------------------------------

    def get_dist(
        self, tensordict: TensorDictBase, *args: Any, mask_key: Any = None, **kwargs: Any
    ) -> Any:
        """Return the model's whole distribution at every position.

        By default, positions without a token are masked. ``mask_key`` selects another mask.
        TorchRL's ``_get_sft_dist`` and similar methods use other masks.

        Each token costs one query and 4 bytes per vocabulary entry. The result has no gradient, so
        it is for inspection and comparison, not for training.

        Raises:
            NotImplementedError: with ``generate=True``, as in TorchRL.
        """
        if mask_key is None:
            mask_key = (self.masks_key, "all_attention_mask")
        return super().get_dist(tensordict, *args, mask_key=mask_key, **kwargs)

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Any:
        """Return the log-probs of all tokens of ``data``.

        Args:
            **get_kwargs: options of ``td.get``, which determine the form of the result.

        Returns:
            Without ``get_kwargs``: float32 [batch, length] with ``pad_output``, else a list of
            float32 [length].

        Raises:
            RuntimeError: with ``generate=True``.
        """
        if self.generate:
            raise RuntimeError("log_prob not callable when generate=True.")
        if not self.pad_output and not get_kwargs:
            get_kwargs = {"as_list": True}
        return self(data).get((self.log_probs_key, "full"), **get_kwargs)


def _service(model: Any) -> Any:
    if isinstance(model, (str, os.PathLike)):
        from .service import AsyncSGLang

        path = os.fspath(model)
        return AsyncSGLang.connect(path) if "://" in path else AsyncSGLang.from_pretrained(path)
    client = getattr(model, "client", model)
    generate = getattr(client, "generate", None)
    if not callable(generate) or inspect.iscoroutinefunction(generate):
        raise TypeError(
            "model must be an AsyncSGLang of sglrl.integrations.torchrl, a sglrl.BlockingClient, "
            f"an address, or a model's name or folder, got {type(model).__name__}"
        )
    return model


def _with_logits(client: BlockingClient, samples: Sequence[Sample]) -> list[Sample]:
    """Add logits to scored samples, with one query per token.

    The scored tokens are in the prefix cache, so each query computes a single position.
    """
    prefixes = [s.ids[:i].numpy() for s in samples for i in range(1, len(s.ids))]
    logprobs = iter(client.wait(_distributions(client.source, prefixes)))
    full = []
    for sample in samples:
        logits = torch.zeros(len(sample.ids), client.info.vocab_size)
        for row in logits[1:]:
            row.copy_(torch.from_numpy(next(logprobs).copy()))
        full.append(sample._replace(logits=logits))
    return full


async def _distributions(client: Any, prefixes: Sequence[Any]) -> list[Any]:
    """Return float32 [vocabulary] for each prefix: the log-probs of the next token."""
    some = asyncio.Semaphore(256)

    async def one(ids: Any) -> Any:
        async with some:
            return (await client.next_token_logprobs(ids)).logprobs

    tasks = [asyncio.ensure_future(one(ids)) for ids in prefixes]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
