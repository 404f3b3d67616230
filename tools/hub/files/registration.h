#pragma once
#include <Python.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, M) STABLE_TORCH_LIBRARY(NAME, M)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, M) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, M)
#define MODULE_OF(NAME, TEXT) \
  PyMODINIT_FUNC PyInit_##NAME() { \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT, nullptr, 0, nullptr, \
                                 nullptr, nullptr, nullptr, nullptr}; \
    return PyModule_Create(&module); \
  }
#define TEXT_OF(NAME) #NAME
#define REGISTER_EXTENSION(NAME) REGISTER_EXPANDED(NAME)
#define REGISTER_EXPANDED(NAME) MODULE_OF(NAME, TEXT_OF(NAME))
