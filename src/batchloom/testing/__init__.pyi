from .contracts import check_loader as check_loader, check_source as check_source
from .equivalence import assert_packed_equals_unpacked as assert_packed_equals_unpacked
from .stores import append_documents as append_documents, write_store as write_store
