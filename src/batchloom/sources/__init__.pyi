from .beginnings import read_ahead as read_ahead
from .cuts import RecordBounds as RecordBounds
from .forms import Asked as Asked
from .hub import hub_name as hub_name
from .labels import input_labels as input_labels
from .listing import list_sources as list_sources
from .parts import PartReader as PartReader, parts_of as parts_of
from .places import error_of as error_of
from .rules import Limits as Limits, Part as Part, ReadRules as ReadRules
from .streams import PartStream as PartStream
from .text_cuts import document_end as document_end
