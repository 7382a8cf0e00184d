//! Compiles the fused operations against libtorch's headers, and lets every binary, test and example of this package find libtorch
//! without `LD_LIBRARY_PATH`; tells build scripts of dependants where it is.

use std::path::{Path, PathBuf};

/// Operations of a model, and what they include.
const FUSED: [&str; 17] = [
    "src/model/fused/rows.cpp",
    "src/model/fused/attention.cpp",
    "src/model/fused/slots.cpp",
    "src/model/fused/nf4.cpp",
    "src/model/fused/libtorch.cpp",
    "src/model/fused/half.cpp",
    "src/model/fused/products.cpp",
    "src/model/fused/delta_chunks.cpp",
    "src/model/fused/delta_inputs.cpp",
    "src/model/fused/flash.cpp",
    "src/model/fused/gpu/launch.cpp",
    "src/model/fused/gpu/rows.cpp",
    "src/model/fused/gpu/experts.cpp",
    "src/model/fused/gpu/slots.cpp",
    "src/model/graph.cpp",
    "src/model/shared_memory.cpp",
    "src/model/stream.cpp",
];
const HEADERS: [&str; 5] = [
    "src/model/fused/attention.hpp",
    "src/model/fused/guarded.hpp",
    "src/model/fused/vectors.hpp",
    "src/model/fused/gpu/launch.hpp",
    "src/model/fused/gpu/args.h",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Not folders, whose Rust files change nothing here.
    FUSED.iter().chain(&HEADERS).for_each(|file| println!("cargo::rerun-if-changed={file}"));
    println!("cargo::rerun-if-changed=src/ranks");
    // Absent when the crate is built without libtorch.
    let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let lib = std::fs::canonicalize(&lib).unwrap_or_else(|_| PathBuf::from(&lib));
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::metadata=LIBTORCH_LIB={}", lib.display());
    // Clippy links nothing, and its build scripts run apart from the others.
    let lints = std::env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.contains("clippy"));
    if !lints {
        compile_fused(&lib);
        compile_ranks(&lib);
    }
}

fn compile_fused(lib: &Path) {
    let include = lib.parent().map(|root| root.join("include")).unwrap_or_default();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // Always optimised: a debug build trains models in its tests. The flags allow sums to be vectorised and keep NaN and infinity.
        .opt_level(3)
        // The threads of libtorch, whose OpenMP library is linked already.
        .flag("-fopenmp")
        .flag("-fno-math-errno")
        .flag("-fno-trapping-math")
        .flag("-fno-signed-zeros")
        .flag("-fassociative-math")
        .warnings(false)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .files(FUSED)
        .compile("rollflow_fused");
}

/// torch's collectives; `stand_ins` replaces the headers of Gloo, which libtorch does not ship.
fn compile_ranks(lib: &Path) {
    let include = lib.parent().map(|root| root.join("include")).unwrap_or_default();
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .include("src/ranks/stand_ins")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .file("src/ranks/group.cpp")
        .compile("rollflow_ranks");
}
