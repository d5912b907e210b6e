"""Use genlm with sglrl: ``from sglrl.integrations.genlm import AsyncSGLTransformer``.

The class has the interface of genlm-backend's ``AsyncLM``. If genlm-backend is installed, the class
is a subclass of ``AsyncLM``. The class needs neither genlm-backend nor the versions of SGLang and
transformers that genlm-backend requires.

``queries`` sends a query from its caller's event loop to the client's event loop, and
``deliveries`` sends the result back. Both loops may be the same.
"""

from .model import AsyncSGLTransformer, Token, load_model_by_name

__all__ = ["AsyncSGLTransformer", "Token", "load_model_by_name"]
