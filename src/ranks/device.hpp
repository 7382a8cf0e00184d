// The entry of a shared object that makes groups for tensors of a device: `nccl.cpp`, or a stand-in of tests.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

// Makes this rank's end of a group that meets in `store`. `address`: of this host, for a network that needs one. Throws.
using rollflow_device_group_fn =
    c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const char* address);

// Its name in the shared object.
extern "C" rollflow_device_group_fn rollflow_device_group;
