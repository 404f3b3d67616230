// An empty Python module: importing it loads the library, which registers the operators.
#pragma once

#include <Python.h>

// torch calls operators without the GIL, so a free-threaded Python needs none for them.
#ifdef Py_GIL_DISABLED
#define FASTKD_WITHOUT_GIL(module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED)
#else
#define FASTKD_WITHOUT_GIL(module)
#endif

#define FASTKD_PYTHON_MODULE(name)                                                   \
  PyMODINIT_FUNC PyInit_##name() {                                                   \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, \
                                 nullptr,               nullptr, nullptr, nullptr};  \
    PyObject* const made = PyModule_Create(&module);                                 \
    FASTKD_WITHOUT_GIL(made);                                                        \
    return made;                                                                     \
  }
