/* Token ids on their way in: the loops over a prompt that every call makes.
 *
 * tokens.py does without where this could not be compiled. Not of the stable ABI, whose functions
 * for every item take three times as long as the macros.
 */
#include <Python.h>
#include <stdint.h>

/* The value of an exact int; -1 of one that is no id. Most have one digit, which is read in place. */
static inline long
id_of(PyObject *number)
{
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)number))
        return (long)PyUnstable_Long_CompactValue((PyLongObject *)number);
#else
    if (Py_SIZE(number) == 1)
        return (long)((PyLongObject *)number)->ob_digit[0];
#endif
    int overflow = 0;
    long value = PyLong_AsLongAndOverflow(number, &overflow);
    return overflow ? -1 : value;
}

PyDoc_STRVAR(pack_doc,
"pack(ids, vocab_size)\n--\n\n"
"The ids of a list or tuple as int32, little-endian; None unless there are some, and all are exactly\n"
"ints (a bool is not) in [0, vocab_size). vocab_size: at most 2**31.");

static PyObject *
pack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "pack() takes 2 arguments, got %zd", nargs);
        return NULL;
    }
    PyObject *ids = args[0];
    long long vocab_size = PyLong_AsLongLong(args[1]);
    if (vocab_size == -1 && PyErr_Occurred())
        return NULL;
    if (!PyList_CheckExact(ids) && !PyTuple_CheckExact(ids))
        Py_RETURN_NONE;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(ids);
    PyObject **items = PySequence_Fast_ITEMS(ids);
    if (count <= 0 || count > PY_SSIZE_T_MAX / 4 || vocab_size > (1LL << 31))
        Py_RETURN_NONE;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * 4);
    if (packed == NULL)
        return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(packed);
    for (Py_ssize_t i = 0; i < count; i++, out += 4) {
        /* Borrowed: nothing in this loop runs Python code, so nobody can take the item away. */
        long id = PyLong_CheckExact(items[i]) ? id_of(items[i]) : -1;
        if (id < 0 || id >= vocab_size) {
            Py_DECREF(packed);
            Py_RETURN_NONE;
        }
        uint32_t value = (uint32_t)id;
        out[0] = (unsigned char)value;
        out[1] = (unsigned char)(value >> 8);
        out[2] = (unsigned char)(value >> 16);
        out[3] = (unsigned char)(value >> 24);
    }
    return packed;
}

PyDoc_STRVAR(in_range_doc,
"in_range(ids, vocab_size)\n--\n\n"
"Whether bytes are int32 ids, little-endian, all in [0, vocab_size). vocab_size: at most 2**31.");

static PyObject *
in_range(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "in_range() takes 2 arguments, got %zd", nargs);
        return NULL;
    }
    long long vocab_size = PyLong_AsLongLong(args[1]);
    if (vocab_size == -1 && PyErr_Occurred())
        return NULL;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(args[0], &data, &size) < 0)
        return NULL;
    if (size % 4 || vocab_size < 0 || vocab_size > (1LL << 31))
        Py_RETURN_FALSE;
    /* Negative ones are the largest of all when they are taken as unsigned. */
    uint32_t largest = 0;
    for (const unsigned char *at = (unsigned char *)data, *end = at + size; at < end; at += 4) {
        uint32_t id = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        if (id > largest)
            largest = id;
    }
    return PyBool_FromLong(!size || largest < vocab_size);
}

static PyMethodDef methods[] = {
    {"in_range", (PyCFunction)(void (*)(void))in_range, METH_FASTCALL, in_range_doc},
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, pack_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef_Slot slots[] = {
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sglrl._ids",
    .m_doc = "See tokens.py.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__ids(void)
{
    return PyModuleDef_Init(&definition);
}
