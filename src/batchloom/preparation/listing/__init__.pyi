from .input_listing import (
    is_named as is_named,
    leave_out_unfit as leave_out_unfit,
    list_inputs as list_inputs,
)
