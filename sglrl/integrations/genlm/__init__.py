"""Use genlm with sglrl: ``from sglrl.integrations.genlm import AsyncSGLTransformer``.

The class has the interface of genlm-backend's ``AsyncLM``. If genlm-backend is installed, the class
is a subclass of ``AsyncLM``. It needs neither genlm-backend nor the versions of SGLang and
transformers that genlm-backend requires.

A query goes from its caller's event loop to the client's (``queries``), and its result goes back
(``deliveries``). Both may be the same loop.
"""

from .model import AsyncSGLTransformer, Token, load_model_by_name

__all__ = ["AsyncSGLTransformer", "Token", "load_model_by_name"]
