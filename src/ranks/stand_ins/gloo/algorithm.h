// Replaces a header of Gloo that libtorch does not ship. ProcessGroupGloo.hpp names it and needs nothing of it.
#pragma once
