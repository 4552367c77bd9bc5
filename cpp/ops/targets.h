// Compiles the functions between TIDE_BEGIN_TARGET and TIDE_END_TARGET for an instruction set.
#pragma once

#if defined(__clang__)
#define TIDE_BEGIN_TARGET_(text) _Pragma(text)
#define TIDE_BEGIN_TARGET(set) \
  TIDE_BEGIN_TARGET_(TIDE_TEXT(clang attribute push(__attribute__((target(set))), apply_to = function)))
#define TIDE_END_TARGET _Pragma("clang attribute pop")
#else
#define TIDE_BEGIN_TARGET(set) _Pragma("GCC push_options") _Pragma(TIDE_TEXT(GCC target(set)))
#define TIDE_END_TARGET _Pragma("GCC pop_options")
#endif
#define TIDE_TEXT(...) #__VA_ARGS__
