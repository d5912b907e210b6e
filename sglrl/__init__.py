from .actor import Actor, endpoint
from .spawn import spawn
