from .output_columns import coerce_row as coerce_row
from .row_conversion import ConversionResult as ConversionResult
