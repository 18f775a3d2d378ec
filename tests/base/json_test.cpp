#include "zeropage/base/json.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace zeropage;

TEST_CASE("JSON reads back as it was written") {
  const std::string text = R"({"a":[1,-2,null,true,false],"b":{"":"\"\\\u0001\n"},"c":[],"d":{},"é":"𝄞"})";
  CHECK(Json::parse(text).dump() ==
        R"({"a":[1,-2,null,true,false],"b":{"":"\"\\\u0001\u000a"},"c":[],"d":{},"é":"𝄞"})");
  CHECK(Json::parse(" [ 1 , 2 ]\n").array().size() == 2);
}

TEST_CASE("numbers are exact") {
  for (const double number : {0.1, 1e-08, 3.0, -1.5e300, 5e-324, 0.30000000000000004}) {
    const Json read = Json::parse(Json(number).dump());
    CHECK_FALSE(read.is_integer());
    CHECK(read.number() == number);
  }
  CHECK(Json(3.0).dump() == "3.0");
  CHECK(Json::parse("9223372036854775807").integer() == std::numeric_limits<std::int64_t>::max());
  CHECK(Json::parse("9223372036854775808").number() == 9223372036854775808.0);
  CHECK(std::isnan(Json::parse("NaN").number()));
  CHECK(Json::parse("[-Infinity]").array()[0].number() == -std::numeric_limits<double>::infinity());
  CHECK(Json::parse("-1e999").number() == -std::numeric_limits<double>::infinity());
  CHECK(Json::parse("1e-999").number() == 0.0);
}

TEST_CASE("escapes of Python's json become UTF-8") {
  CHECK(Json::parse(R"("\u00e9\ud834\udd1e\/")").text() == "é𝄞/");
  CHECK(Json::parse(R"("\ud834x")").text() == "\xef\xbf\xbdx");  // a lone surrogate
}

TEST_CASE("of equal keys the last counts") {
  const Json object = Json::parse(R"({"a":1,"a":2})");
  CHECK(object.at("a").integer() == 2);
  CHECK(object.find("b") == nullptr);
  CHECK_THROWS_WITH_AS(object.at("b"), "\"b\" is missing", JsonError);
  CHECK_THROWS_WITH_AS(object.at("a").text(), "a value is not text", JsonError);
}

TEST_CASE("text that is not JSON is an error with its place") {
  CHECK_THROWS_WITH_AS(Json::parse("{\n  \"a\": 01}"), "'}' is missing at line 2, column 9", JsonError);
  for (const char* text :
       {"", "{", "[1,]", "{\"a\":1,}", "{a:1}", "'a'", "1.", "1e", "+1", ".5", "nul", "[1] 2", "\"a", "\"\n\"",
        "\"\\x\"", "\"\\u12g4\"", "\"\xff\"", "\"\xc0\xaf\"", "\"\xed\xa0\x80\""}) {
    CAPTURE(text);
    CHECK_THROWS_AS(Json::parse(text), JsonError);
  }
  CHECK_THROWS_AS(Json::parse(std::string(100000, '[')), JsonError);
  CHECK_THROWS_AS(Json("\xff").dump(), JsonError);
}
