from .inputs import (
    InputArgument as InputArgument,
    as_input_tuple as as_input_tuple,
    default_tokenizer as default_tokenizer,
    input_name as input_name,
    resolve_inputs as resolve_inputs,
)
from .recipe_choice import (
    PrepareRequest as PrepareRequest,
    RecipeReference as RecipeReference,
    make_append_request as make_append_request,
)
from .recipe_file import (
    SETTINGS as SETTINGS,
    format_recipe as format_recipe,
    recipe_settings_for_report as recipe_settings_for_report,
)
