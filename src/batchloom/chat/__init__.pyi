from .choose import BUILT_IN as BUILT_IN, choose_template as choose_template
from .detect import detect_schema as detect_schema, shape_of as shape_of
from .mapping import parse_mapping as parse_mapping
from .media import medium_of as medium_of
from .record_keys import (
    COLUMNS as COLUMNS,
    MESSAGE_KEYS as MESSAGE_KEYS,
    PART_KEYS as PART_KEYS,
    unused_columns as unused_columns,
)
from .records import record_reader as record_reader
from .schema import FORMS as FORMS
from .template import RenderError as RenderError, Template as Template
