from .command import quote as quote
from .packing import packing_facts as packing_facts
