from .row_conversion import ConversionResult as ConversionResult
from .row_files import coerce_row as coerce_row
