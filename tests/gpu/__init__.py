"""What needs a GPU, and the bodies of it. Failed asserts of the bodies show their values too."""

import pytest

pytest.register_assert_rewrite("tests.gpu.set_ups")
