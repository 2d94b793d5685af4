from .schema.detection import compute_record_shape as compute_record_shape, detect_schema as detect_schema
from .schema.record_keys import (
    COLUMN_TABLES as COLUMN_TABLES,
    MESSAGE_KEYS as MESSAGE_KEYS,
    PART_KEYS as PART_KEYS,
    unused_columns as unused_columns,
)
from .schema.record_media import parse_medium as parse_medium, replace_media_with_frames as replace_media_with_frames
from .schema.record_parser import make_record_reader as make_record_reader
from .schema.schemas import FORM_RULES as FORM_RULES, parse_mapping as parse_mapping
from .templates.chat_template import (
    BUILT_IN_TEMPLATES as BUILT_IN_TEMPLATES,
    NO_TEMPLATE as NO_TEMPLATE,
    TEMPLATE_NAMES as TEMPLATE_NAMES,
    ChatTemplate as ChatTemplate,
    RenderError as RenderError,
    choose_template as choose_template,
)
