"""Async-first actors and SGLang workers for reinforcement learning of language models."""

from .actor import Actor, endpoint
from .client import Client
from .completion import Completion
from .launch import launch
from .sampling import SamplingParams
from .spawn import spawn
