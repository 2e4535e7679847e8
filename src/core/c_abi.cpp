#include "qattn/qattn.hpp"
