from .append_checks import (
    check_same_preferences as check_same_preferences,
    check_same_recipe as check_same_recipe,
)
from .inputs import (
    InputArgument as InputArgument,
    as_input_tuple as as_input_tuple,
    input_name as input_name,
    list_inputs as list_inputs,
    resolve_inputs as resolve_inputs,
)
from .manifest_inputs import check_no_manifests as check_no_manifests
from .recipe_choice import (
    PrepareRequest as PrepareRequest,
    RecipeReference as RecipeReference,
    default_dedup as default_dedup,
    describe_remade_store as describe_remade_store,
    make_append_request as make_append_request,
    make_request as make_request,
)
from .recipe_file import (
    SETTINGS as SETTINGS,
    format_recipe as format_recipe,
    recipe_settings as recipe_settings,
    recipe_settings_for_report as recipe_settings_for_report,
)
from .recipe_of_store import describe_input_locations as describe_input_locations
