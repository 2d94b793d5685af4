from .append_checks import refuse_other_kind as refuse_other_kind, refuse_unlike as refuse_unlike
from .inputs import (
    Given as Given,
    as_given as as_given,
    list_inputs as list_inputs,
    name_of as name_of,
    read_inputs as read_inputs,
)
from .manifest_inputs import refuse_manifests as refuse_manifests
from .recipe_choice import (
    Chosen as Chosen,
    RecipePlace as RecipePlace,
    choose_appended as choose_appended,
    choose_recipe as choose_recipe,
    same_as as same_as,
    usual_dedup as usual_dedup,
)
from .recipe_file import (
    SETTINGS as SETTINGS,
    printable_settings as printable_settings,
    recipe_settings as recipe_settings,
    recipe_text as recipe_text,
)
from .recipe_of_store import inputs_lay as inputs_lay
