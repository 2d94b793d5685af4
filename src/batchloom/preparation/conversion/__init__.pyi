from .output_columns import as_row as as_row
from .row_conversion import Converted as Converted
