// fuzz_nf4.cpp - libFuzzer target: any bytes as the JSON of bitsandbytes' NF4. What is read must be written
// and read back the same.

#include <string>
#include <string_view>

#include "llmc/arena.h"  // defines arena_give_back()
#include "llmc/quant_nf4_files.h"
#include "test/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    parse_or_refuse([&] {
        const Nf4State state = parse_nf4_state({reinterpret_cast<const char*>(input), size}, "input");
        if (state.rows < 1 || state.columns < 1) __builtin_trap();
        const std::string json = nf4_state_json(state);
        try {
            if (nf4_state_json(parse_nf4_state(json, "written")) != json) __builtin_trap();
        } catch (const UserError&) {
            __builtin_trap();  // our own JSON must not be refused
        }
    });
    return 0;
}
