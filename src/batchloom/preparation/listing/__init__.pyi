from .input_listing import list_inputs as list_inputs
from .unfit_files import (
    UnfitFile as UnfitFile,
    find_whole_files as find_whole_files,
    is_named as is_named,
    leave_out_read as leave_out_read,
    leave_out_unfit as leave_out_unfit,
)
