// The instruction set that every kernel of the library runs with, chosen when it is first asked for.
#pragma once

namespace raytraced {

enum class Instructions { baseline, avx2 };
Instructions instructions();

}  // namespace raytraced
