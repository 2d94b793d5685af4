from .schema.column_mapping import parse_mapping as parse_mapping
from .schema.detection import detect_schema as detect_schema, shape_of as shape_of
from .schema.record_keys import (
    COLUMNS as COLUMNS,
    MESSAGE_KEYS as MESSAGE_KEYS,
    PART_KEYS as PART_KEYS,
    unused_columns as unused_columns,
)
from .schema.record_media import medium_of as medium_of
from .schema.record_parser import record_reader as record_reader
from .schema.schemas import FORMS as FORMS
from .templates.chat_template import RenderError as RenderError, Template as Template
from .templates.template_choice import BUILT_IN as BUILT_IN, choose_template as choose_template
from .video_frames import with_frames as with_frames
